"""What the stages share, and the command line that starts them."""

__version__ = "0.1.0"
