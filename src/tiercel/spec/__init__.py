"""What a model stores: streams, pages, tails, and the builders for the models we know."""
