#pragma once

// Which file names a client may give a page.

#include <string>

// what is wrong with a file name that a client gives, empty: nothing
// 1 to 200 bytes of UTF-8 without control characters and without what means something in a path on any operating system,
// not beginning with a dot or a space, not ending in a suffix of a page's files and not a device on Windows (con, nul.txt, com1), in
// whatever letter case: some file systems ignore it, and have one file for names that differ in nothing else
std::string server_page_file_name_error(const std::string & name);
