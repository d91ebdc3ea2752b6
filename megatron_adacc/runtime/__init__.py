"""What runs during training: accounting of activation memory."""
