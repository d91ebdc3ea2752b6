"""What runs during training: the stash behind saved-tensor hooks, and accounting of activation memory."""
