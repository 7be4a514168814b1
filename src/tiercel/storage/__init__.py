"""What is kept outside the process: records by key, in files or on other machines."""
