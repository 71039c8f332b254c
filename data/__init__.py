"""Conversations, token rows, loss masks, and the embedded samples. Imports no sibling package."""
