"""Tables, figures and the page of a report. May import answers and all below."""
