"""The environments of a rank: made by the settings, stepped together, saved and gone back to."""
