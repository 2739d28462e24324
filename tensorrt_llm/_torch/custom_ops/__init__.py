"""Operations on cache pools and quantised rows that modules and attention share."""
