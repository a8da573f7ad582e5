"""Views of the records: panels, figures, one HTML page, logger sinks."""
