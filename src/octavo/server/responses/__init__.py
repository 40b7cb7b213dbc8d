"""What the Responses API needs beside its body, its shape and its routes."""
