"""The tests of tierckpt; folders mirror the package's."""
