#pragma once

// Whose files stand under the names of a page: other programs use these names too, and what is theirs is not replaced.

#include "server-page-commit.h"

#include <cstdint>
#include <string>
#include <vector>

// of FILE's head, which is libllama's
server_page_guard server_page_guard_of(uint32_t magic, uint32_t version);

// the suffixes of sidecars that are another program's
server_page_files_result server_page_foreign_sidecars(server_page_os & os, const std::string & dir, const std::string & name, std::vector<std::string> & suffixes);
