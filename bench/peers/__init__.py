"""The same checkpoint on real rivals; see README.md. No dependency of the project."""
