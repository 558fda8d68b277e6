"""The demo model: synthetic pictures, questions about them, and the tiny VLM trained on both.

Nothing here is part of the installed package; the stages load `demo/checkpoint` like any other
checkpoint. Copyright 2026 the epd authors; Apache-2.0.
"""
