#pragma once

// The HTTP edge of the page verbs: the words of a request into steps, and answers into JSON.

#include "server-common.h"
#include "server-pages.h"

#include <optional>
#include <string>

// POST /slots/{id}?action=...
struct server_page_words {
    std::string id_slot;
    std::string action;
    std::string page;
    std::string body;
};

// whether POST /slots/{id}?action=ACTION is a page verb
bool server_page_is_action(const std::string & action);

// of these, which need a directory
bool server_page_has_files(const std::string & action);

// carry out one verb; save_path: of the files; nullopt: the client is gone or was answered
std::optional<server_page_result> server_page_handle(const server_page_steps & steps, const std::string & save_path, const server_page_words & words);

// the answer, or the body of an error
json server_page_result_to_json(const std::string & action, const server_page_result & result);
