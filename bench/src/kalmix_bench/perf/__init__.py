"""Time and check ops and models beside other libraries."""
