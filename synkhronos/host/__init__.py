"""The machine as it is set up: what is there, what is missing, what this process may use."""
