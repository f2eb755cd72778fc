"""What masked language modeling is, in pictures of what this code computes."""
