// The switch between light and dark starts with the preference of the system, as in the pages.
DoxygenAwesomeDarkModeToggle.init();
