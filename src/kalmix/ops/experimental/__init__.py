"""Forms of ops that no layer, command or paper result of this library uses. They may change or go without notice."""
