"""What a server says over HTTP, beside what the library says of itself."""
