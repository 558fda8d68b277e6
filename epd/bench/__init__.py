"""`epd bench`: measures any OpenAI-compatible server over HTTP, and each stage alone.

Nothing here is imported by a service. Times are those of the event loop's clock, so that
tests run the same code on a clock of their own.
"""
