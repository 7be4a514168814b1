"""Running requests on a model and its cache: asks in, tokens out."""
