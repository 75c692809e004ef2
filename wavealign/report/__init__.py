"""What people read: tables, pictures, progress."""
