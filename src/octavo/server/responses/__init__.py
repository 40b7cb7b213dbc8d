"""The Responses API's store and background runs."""
