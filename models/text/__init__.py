"""Tokenizers, chat templates, and text from tokens as they come."""
