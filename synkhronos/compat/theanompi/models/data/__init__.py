"""What classes of data use: ``utils`` divides batches among ranks, and crops images."""
