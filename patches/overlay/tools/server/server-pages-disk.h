#pragma once

// Pages to files and back, on the thread of the client. See patches/page-files.md for what is in which file.

#include "server-page-files.h"
#include "server-pages-live.h"

// publish what is held as the files of `filename` in `dir`, on a thread of low priority: who decodes goes first
// `held`: the answer of server_page_hold() or server_page_copy(); returns the same with what became of it
server_page_result server_page_save(const std::string & dir, const std::string & filename, server_page_result && held);

// a page out of files, in `held`: read and checked, no context has seen it yet; charged to the store
// a sidecar that is missing or damaged costs its part only, and is listed in `losses`
server_page_result server_page_load(const std::string & dir, server_page_store & store, const server_page_request & request, server_pace pace);
