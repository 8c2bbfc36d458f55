"""Import the library, and print the error that this raises."""

try:
    import synkhronos  # noqa: F401
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
