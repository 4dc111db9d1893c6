"""Tables and pictures for terminals and files; rich and matplotlib are imported where they are used."""
