"""Pure decisions: what is evicted, saved and fetched, where tails are kept, where a request resumes."""
