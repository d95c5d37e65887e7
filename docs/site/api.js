// The switch between light and dark begins as the pages' does: with what the system prefers.
DoxygenAwesomeDarkModeToggle.init();
