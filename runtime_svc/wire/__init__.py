"""Messages of the API to values and back, by functions. Must not decide anything."""
