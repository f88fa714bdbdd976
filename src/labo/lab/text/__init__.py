"""What tasks on text share: lines, subwords, prepared folders, token statistics."""
