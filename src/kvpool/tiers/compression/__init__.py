"""Values made smaller on their way into a tier: codecs, fp8, and the tier that uses them."""
