"""Plans that follow the training: when to look, what to look at, and what to do about it."""
