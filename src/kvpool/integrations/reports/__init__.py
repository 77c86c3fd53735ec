"""What a connector tells people and other programs about itself."""
