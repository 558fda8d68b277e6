"""`epd bench stage`: each stage alone, beside the floor that the machine sets, in one run."""
