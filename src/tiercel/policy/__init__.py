"""When: who is evicted, what is saved, where tails are placed, what a request resumes from."""
