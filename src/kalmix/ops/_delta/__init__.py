"""The op `delta`: a memory that corrects its errors."""
