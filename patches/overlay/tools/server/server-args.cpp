#include "server-args.h"

#include "arg.h"
#include "build-info.h"
#include "common.h"
#include "hash/hash.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <vector>

using json = nlohmann::ordered_json;

static const char * const ASKED_FOR = "--print-args-json";

static const std::set<std::string> LIVE = { "--ctx-size", "--parallel", "--kv-unified" };

static const std::set<std::string> CONTEXT = {
    "--threads", "--threads-batch", "--cpu-mask", "--cpu-range", "--cpu-strict", "--prio", "--poll",
    "--cpu-mask-batch", "--cpu-range-batch", "--cpu-strict-batch", "--prio-batch", "--poll-batch",
    "--batch-size", "--ubatch-size", "--flash-attn", "--swa-full", "--kv-offload", "--op-offload", "--perf",
    "--cache-type-k", "--cache-type-v",
    "--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale",
    "--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow", "--yarn-beta-fast",
};

static const std::set<std::string> SERVER = {
    "--host", "--port", "--reuse-port", "--path", "--api-prefix", "--api-key", "--api-key-file", "--ssl-key-file", "--ssl-cert-file",
    "--timeout", "--threads-http", "--alias", "--tags", "--instance-id", "--admin-private", "--quiesced", "--ui", "--ui-config", "--ui-config-file",
    "--metrics", "--props", "--slots", "--slot-save-path", "--slot-prompt-similarity", "--sleep-idle-seconds",
    "--page-ram-bytes", "--ctx-checkpoints", "--ctx-checkpoints-bytes", "--cache-prompt", "--cache-reuse", "--cache-ram",
    "--cont-batching", "--context-shift", "--cache-idle-slots", "--media-path", "--warmup",
    "--jinja", "--chat-template", "--chat-template-file", "--chat-template-kwargs", "--reasoning-format", "--reasoning", "--reasoning-budget",
    "--reasoning-budget-message", "--prefill-assistant", "--skip-chat-parsing", "--special", "--n-predict", "--keep",
    "--log-disable", "--log-file", "--log-colors", "--log-prefix", "--log-timestamps", "--verbose", "--verbosity", "--offline",
};

static const std::set<std::string> SECRET = { "--api-key", "--hf-token" };

static std::string name_of(const common_arg & opt) {
    // the longest is the one that explains itself
    return *std::max_element(opt.args.begin(), opt.args.end(), [](const char * a, const char * b) { return std::strlen(a) < std::strlen(b); });
}

static const char * class_of(const common_arg & opt) {
    const auto is_one_of = [&](const std::set<std::string> & names) {
        return std::any_of(opt.args.begin(), opt.args.end(), [&](const char * arg) { return names.count(arg) > 0; });
    };
    return is_one_of(LIVE) ? "live" : is_one_of(CONTEXT) ? "context" : opt.is_sampling || is_one_of(SERVER) ? "server" : "model";
}

static bool is_secret(const common_arg & opt) {
    return std::any_of(opt.args.begin(), opt.args.end(), [](const char * arg) { return SECRET.count(arg) > 0; });
}

static json option_to_json(const common_arg & opt) {
    const int arity = opt.handler_str_str ? 2 : opt.handler_string || opt.handler_int ? 1 : 0;

    return {
        { "name",     name_of(opt) },
        { "args",     opt.args },
        { "args_neg", opt.args_neg },
        { "env",      opt.env ? json(opt.env) : json(nullptr) },
        { "arity",    arity },
        { "class",    class_of(opt) },
    };
}

bool server_args_asked_for(int argc, char ** argv) {
    return std::any_of(argv + 1, argv + argc, [](const char * arg) { return std::strcmp(arg, ASKED_FOR) == 0; });
}

int server_args_print(int argc, char ** argv) {
    std::vector<char *> args(argv, argv + argc);
    args.erase(std::remove_if(args.begin() + 1, args.end(), [](const char * arg) { return std::strcmp(arg, ASKED_FOR) == 0; }), args.end());

    json given = json::array();

    common_params           params;
    std::vector<common_arg> options;

    const bool ok = common_params_parse(int(args.size()), args.data(), params, LLAMA_EXAMPLE_SERVER, options,
        [&](const common_arg & opt, const std::vector<std::string> & values, const std::string & source) {
            json shown = json::array();
            for (const auto & value : values) {
                shown.push_back(is_secret(opt) ? "sha256:" + hash_sha256_hex(value.data(), value.size()) : value);
            }
            given.push_back({ { "name", name_of(opt) }, { "values", shown }, { "source", source } });
        });
    if (!ok) {
        return 1;
    }

    json all = json::array();
    for (const auto & opt : options) {
        if (!opt.args.empty() && !opt.is_preset_only) {
            all.push_back(option_to_json(opt));
        }
    }
    const json out = { { "build", llama_build_info() }, { "options", all }, { "given", given } };

    std::puts(out.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
    return std::ferror(stdout) ? 1 : 0;
}
