#include "server-page-identity.h"

#include "server-page-checksum.h"

#include "ggml-cpp.h"
#include "gguf.h"
#include "llama.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <fstream>
#include <stdexcept>

// of each tensor, evenly spread over it: a fine-tune changes values everywhere
static constexpr size_t N_SAMPLES      = 16;
static constexpr size_t N_BYTES_SAMPLE = 4096;

static void append(std::vector<uint8_t> & content, std::ifstream & file, uint64_t offset, size_t n_bytes) {
    const size_t n_before = content.size();

    content.resize(n_before + n_bytes);
    file.seekg(offset);
    file.read(reinterpret_cast<char *>(content.data() + n_before), n_bytes);
}

// what tells one part from another; returns the number of parts that the first one names
static int append_part(std::vector<uint8_t> & content, const std::string & path) {
    gguf_context_ptr meta(gguf_init_from_file(path.c_str(), { /*.no_alloc =*/ true, /*.ctx =*/ nullptr }));

    std::ifstream file(path, std::ios::binary | std::ios::ate);
    if (!meta || !file) {
        throw std::runtime_error("cannot read '" + path + "'");
    }

    const uint64_t n_bytes = file.tellg();
    const uint64_t n_meta  = gguf_get_data_offset(meta.get());

    content.insert(content.end(), reinterpret_cast<const uint8_t *>(&n_bytes), reinterpret_cast<const uint8_t *>(&n_bytes + 1));
    append(content, file, 0, std::min(n_meta, n_bytes));

    for (int64_t i = 0; i < gguf_get_n_tensors(meta.get()); ++i) {
        const uint64_t offset = n_meta + gguf_get_tensor_offset(meta.get(), i);
        const uint64_t size   = gguf_get_tensor_size(meta.get(), i);

        if (size <= N_SAMPLES*N_BYTES_SAMPLE) {
            append(content, file, offset, size);
            continue;
        }
        for (size_t k = 0; k < N_SAMPLES; ++k) {
            append(content, file, offset + (size - N_BYTES_SAMPLE)*k/(N_SAMPLES - 1), N_BYTES_SAMPLE);
        }
    }
    if (!file) {
        throw std::runtime_error("cannot read '" + path + "'");
    }

    const int64_t key = gguf_find_key(meta.get(), "split.count");

    return key < 0 ? 1 : gguf_get_val_u16(meta.get(), key);
}

std::string server_model_fingerprint(const std::string & path) {
    std::vector<uint8_t> content;

    const int n_parts = append_part(content, path);

    std::vector<char> prefix(path.size() + 1);
    if (n_parts > 1 && llama_split_prefix(prefix.data(), prefix.size(), path.c_str(), 0, n_parts) > 0) {
        for (int i = 1; i < n_parts; ++i) {
            std::vector<char> part(path.size() + 64);
            llama_split_path(part.data(), part.size(), prefix.data(), i, n_parts);
            append_part(content, part.data());
        }
    }

    return string_format("%016" PRIx64, server_page_checksum(content.data(), content.size()));
}

server_loaded_files server_fingerprint_loaded(const common_params & params, bool has_draft_model, std::string & error) {
    const auto fingerprint = [&](const std::string & path) {
        try {
            return server_model_fingerprint(path);
        } catch (const std::exception & e) {
            error += (error.empty() ? "" : "; ") + std::string(e.what());
            return string_format("unread-%" PRId64, ggml_time_us());
        }
    };

    server_loaded_files res;

    res.model = fingerprint(params.model.path);

    if (has_draft_model) {
        res.draft = fingerprint(params.speculative.draft.mparams.path);
    }

    for (const auto & cvec : params.control_vectors) {
        res.cvec = (res.cvec == "none" ? "" : res.cvec + ", ") + fingerprint(cvec.fname) + string_format(" * %g", cvec.strength);
    }
    if (res.cvec != "none") {
        res.cvec += string_format(" in layers %d to %d", params.control_vector_layer_start, params.control_vector_layer_end);
    }

    for (const auto & lora : params.lora_adapters) {
        res.lora.push_back(fingerprint(lora.path));
    }

    return res;
}

static std::string overrides(const common_params & params) {
    std::string res;

    for (const auto & o : params.kv_overrides) {
        const std::string key = o.key;
        // the last one is empty; the context length that a model was trained with is geometry
        if (key.empty() || (key.size() > 15 && key.compare(key.size() - 15, 15, ".context_length") == 0)) {
            continue;
        }
        res += (res.empty() ? "" : ", ") + key + "=";
        switch (o.tag) {
            case LLAMA_KV_OVERRIDE_TYPE_INT:   res += std::to_string(o.val_i64);       break;
            case LLAMA_KV_OVERRIDE_TYPE_FLOAT: res += string_format("%g", o.val_f64);  break;
            case LLAMA_KV_OVERRIDE_TYPE_BOOL:  res += o.val_bool ? "true" : "false";   break;
            case LLAMA_KV_OVERRIDE_TYPE_STR:   res += o.val_str;                       break;
        }
    }

    return res.empty() ? "none" : res;
}

server_page_identity server_page_identity_of(const common_params & params, const server_loaded_files & files, bool has_draft, const std::string & rope_factors) {
    server_page_identity res;

    const auto add = [&](const char * field, const std::string & value) { res.fields.emplace_back(field, value); };

    const auto & draft = params.speculative.draft;

    add("model",           files.model);
    add("model_overrides", overrides(params));
    add("control_vectors", files.cvec);
    add("cache_type_k",    ggml_type_name(params.cache_type_k));
    add("cache_type_v",    ggml_type_name(params.cache_type_v));
    add("v_layout",        params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED ? "transposed" : "plain");
    add("swa_cache",       params.swa_full ? "full" : "window");
    add("rope",            string_format("scaling %d, base %g, scale %g, yarn %g %g %g %g %d",
                               (int) params.rope_scaling_type, params.rope_freq_base, params.rope_freq_scale,
                               params.yarn_ext_factor, params.yarn_attn_factor, params.yarn_beta_fast, params.yarn_beta_slow, params.yarn_orig_ctx));
    add("rope_factors",    rope_factors);
    add("draft",           !has_draft ? "none" : (files.draft == "none" ? "the model's own" : files.draft) +
                               string_format(", %s, %s", ggml_type_name(draft.cache_type_k), ggml_type_name(draft.cache_type_v)));

    return res;
}
