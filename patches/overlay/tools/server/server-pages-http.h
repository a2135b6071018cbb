#pragma once

// The HTTP edge of the page verbs: the words of a request into steps, and answers into JSON.

#include "server-common.h"
#include "server-pages.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>

// whether POST /slots/{id}?action=ACTION is a page verb
bool server_page_is_action(const std::string & action);

// carry out one verb
// `run` has a step done by the thread that runs the slots and waits for it: nullopt, the client is gone or was answered
// `allocate` makes memory that is resident for a state of n_bytes, on the thread of the caller; throws std::bad_alloc
std::optional<server_page_result> server_page_handle(
        const std::string & id_slot,
        const std::string & action,
        const std::string & name,
        const std::function<std::optional<server_page_result>(const server_page_request &)> & run,
        const std::function<std::shared_ptr<server_page_base>(size_t n_bytes)>              & allocate);

// the answer, or the body of an error
json server_page_result_to_json(const server_page_result & result);
