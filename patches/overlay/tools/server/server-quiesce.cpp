#include "server-quiesce.h"

#include <stdexcept>

server_quiesce_request server_quiesce_parse(const std::string & body) {
    const json data = json::parse_no_throw(body);
    if (!data.is_object()) {
        throw std::invalid_argument("the body has to be a JSON object");
    }

    server_quiesce_request res;

    bool has_is_quiet = false;
    for (const auto & [key, value] : data.items()) {
        if (key == "model") {
            continue; // the router has read it to find this process
        }
        if (key != "is_quiet" && key != "cut") {
            throw std::invalid_argument("unknown field '" + key + "'");
        }
        if (!value.is_boolean()) {
            throw std::invalid_argument("'" + key + "' has to be true or false");
        }
        has_is_quiet |= key == "is_quiet";
        (key == "cut" ? res.cut : res.is_quiet) = value.get<bool>();
    }

    if (!has_is_quiet) {
        throw std::invalid_argument("'is_quiet' is missing");
    }
    if (res.cut && !res.is_quiet) {
        throw std::invalid_argument("'cut' goes with 'is_quiet': true only");
    }

    return res;
}

json server_quiesce_result::to_json() const {
    return {
        {"is_quiet",     is_quiet},
        {"n_processing", n_processing},
        {"n_parked",     n_parked},
        {"n_waiting",    n_waiting},
        {"n_cut",        n_cut},
    };
}
