"""Decoding with drafts, without loss, and measuring it."""
