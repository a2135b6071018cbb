#include "server-memory-estimate.h"

#include "server-common.h"
#include "server-context.h"
#include "server-memory.h"

#include "build-info.h"
#include "common.h"
#include "log.h"
#include "speculative.h"

#include "../../src/llama-ext.h" // staging API: llama_get_memory_breakdown

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>

static const char * const ASKED_FOR = "--print-memory-json";

struct device_memory {
    size_t model   = 0;
    size_t context = 0;
    size_t compute = 0;
};

using memory_by_device = std::map<ggml_backend_dev_t, device_memory>;

static ggml_backend_dev_t device_of(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_is_host(buft) ? nullptr : ggml_backend_buft_get_device(buft);

    return dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

static void add_memory(const llama_context * ctx, bool with_model, memory_by_device & res) {
    for (const auto & [buft, size] : llama_get_memory_breakdown(ctx)) {
        auto & device = res[device_of(buft)];

        device.model   += with_model ? size.model : 0;
        device.context += size.context;
        device.compute += size.compute;
    }

    res[device_of(ggml_backend_cpu_buffer_type())].context += SERVER_KV_CELL_BYTES * llama_n_ctx(ctx);
}

static json devices_to_json(const memory_by_device & devices) {
    json res = json::array();

    for (const auto & [dev, size] : devices) {
        const bool is_host = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;

        size_t free  = 0;
        size_t total = 0;
        ggml_backend_dev_memory(dev, &free, &total);

        const int64_t n_available = is_host ? server_memory_available() : 0;

        res.push_back({
            {"name",    ggml_backend_dev_name(dev)},
            {"is_host", is_host},
            {"model",   size.model},
            {"context", size.context},
            {"compute", size.compute},
            {"free",    n_available > 0 ? n_available : (int64_t) free},
            {"total",   total},
        });
    }

    return res;
}

bool server_memory_asked_for(int & argc, char ** argv) {
    char ** const end = std::remove_if(argv + 1, argv + argc, [](const char * arg) { return std::strcmp(arg, ASKED_FOR) == 0; });

    const int  n_before = argc;
    argc = end - argv;

    return argc < n_before;
}

int server_memory_print(common_params params) {
    if (params.model.path.empty()) {
        SRV_ERR("%s", "--print-memory-json needs the file of a model: --model\n");
        return 1;
    }

    // the tables of the cells are the one thing that grows with the context and is allocated all the same
    const int64_t n_available = server_memory_available();
    if (n_available > 0 && SERVER_KV_CELL_BYTES * params.n_ctx > n_available) {
        SRV_ERR("a context of %d tokens takes %" PRId64 " bytes beside its KV cache, %" PRId64 " are available\n",
                params.n_ctx, SERVER_KV_CELL_BYTES * params.n_ctx, n_available);
        return 1;
    }

    // a server aborts over these
    if (params.n_parallel > params.n_batch) {
        SRV_ERR("%d slots need a batch of as many tokens, it has %d\n", params.n_parallel, params.n_batch);
        return 1;
    }

    json left_out = json::array();
    const auto leave_out = [&](const char * name, bool is_given) {
        if (is_given) {
            left_out.push_back(name);
        }
    };
    leave_out("mmproj",         !params.mmproj.path.empty());
    leave_out("lora",           !params.lora_adapters.empty());
    leave_out("control_vector", !params.control_vectors.empty());

    params.lora_adapters  .clear();
    params.control_vectors.clear();

    params.no_alloc  = true;
    params.load_mode = LLAMA_LOAD_MODE_NONE;
    params.warmup    = false;

    const auto output_limits = server_output_limits(params);
    params.n_outputs_max         = output_limits.total;
    params.n_outputs_max_per_seq = output_limits.per_seq;

    const auto init = common_init_from_params(params);

    llama_context * ctx = init->context();
    if (ctx == nullptr) {
        return 1;
    }

    memory_by_device devices;

    add_memory(ctx, true, devices);

    common_params params_dft = common_base_params_to_speculative(params);

    const auto spec = common_speculative_init_from_params(params_dft, init->model(), ctx);

    if (spec->context()) {
        add_memory(spec->context(), spec->model() != nullptr, devices);
    } else if (params.speculative.has_dft()) {
        return 1;
    }

    const json out = {
        {"build",      llama_build_info()},
        {"n_ctx",      llama_n_ctx(ctx)},
        {"n_seq",      llama_n_seq_max(ctx)},
        {"kv_unified", params.kv_unified},
        {"devices",    devices_to_json(devices)},
        {"left_out",   left_out},
    };

    std::puts(safe_json_to_str(out).c_str());
    return std::ferror(stdout) ? 1 : 0;
}
