"""`compose` over classes of real frameworks: their own runners, and models that answer from a
list.
"""
