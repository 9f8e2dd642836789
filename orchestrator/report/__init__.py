"""Records as a person reads them: one run as tables and a closing line, several side by side, or a page of HTML."""
