"""The gateway under load: many streams, a scripted engine, and the web stack's own ceiling."""
