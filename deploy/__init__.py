"""What it takes to build and run the project on a machine."""
