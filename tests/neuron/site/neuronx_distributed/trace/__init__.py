"""Doubles of the parts that trace and compile."""
