"""What things cost: time of ops and codecs, memory of parameters, optimizer and schedules, the backward pass."""
