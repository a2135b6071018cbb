#include "server-page-store.h"

#include <algorithm>
#include <utility>

struct server_page_store::budget {
    explicit budget(size_t limit) : limit(limit) {}

    // bytes that are charged for as long as this lives
    struct taken final : server_page_charge {
        explicit taken(std::shared_ptr<budget> from) : from(std::move(from)) {}

        ~taken() override {
            std::lock_guard<std::mutex> lock(from->mutex);
            from->used -= n_bytes;
            from->passing &= !passing;
        }

        std::shared_ptr<budget> from;

        size_t n_bytes = 0;
        bool   passing = false; // the one that may pass the ceiling
    };

    size_t limit;

    mutable std::mutex mutex;
    size_t used    = 0;
    bool   passing = false;

    // the mutex is held; `n_bytes_freed` is part of what is used
    bool fits(size_t n_bytes, size_t n_bytes_freed) const {
        return limit == 0 || n_bytes == 0 || (n_bytes <= limit && used - n_bytes_freed <= limit - n_bytes);
    }
};

server_page_store::server_page_store(size_t limit) : bytes(std::make_shared<budget>(limit)) {}

void server_page_store::set_limit(size_t limit) {
    std::lock_guard<std::mutex> lock(bytes->mutex);
    bytes->limit = limit;
}

size_t server_page_store::limit() const {
    std::lock_guard<std::mutex> lock(bytes->mutex);
    return bytes->limit;
}

size_t server_page_store::used() const {
    std::lock_guard<std::mutex> lock(bytes->mutex);
    return bytes->used;
}

size_t server_page_store::freed_by_replacing(const std::string & name) const {
    const auto it = entries.find(name);

    return it != entries.end() && it->second.page && it->second.page.use_count() == 1 ? it->second.page->n_bytes : 0;
}

std::shared_ptr<server_page_charge> server_page_store::charge(size_t n_bytes, size_t n_bytes_freed, bool passing) {
    auto res = std::make_shared<budget::taken>(bytes);

    std::lock_guard<std::mutex> lock(bytes->mutex);

    if (!bytes->fits(n_bytes, 0)) {
        if (bytes->passing || !(passing || bytes->fits(n_bytes, n_bytes_freed))) {
            return nullptr;
        }
        bytes->passing = res->passing = true;
    }
    bytes->used += res->n_bytes = n_bytes;

    return res;
}

std::shared_ptr<server_page_charge> server_page_store::reserve(const std::string & name, size_t n_bytes) {
    std::lock_guard<std::mutex> lock(mutex);

    return charge(n_bytes, freed_by_replacing(name), false);
}

std::shared_ptr<server_page_charge> server_page_store::reserve_passing(size_t n_bytes) {
    return charge(n_bytes, 0, true);
}

void server_page_store::settle(server_page_base & page) {
    auto & taken = static_cast<budget::taken &>(*page.charge);

    std::lock_guard<std::mutex> lock(bytes->mutex);

    const bool fits = bytes->fits(page.n_bytes, taken.n_bytes);

    bytes->used += page.n_bytes - taken.n_bytes;
    taken.n_bytes = page.n_bytes;

    if (fits) {
        bytes->passing &= !taken.passing;
        taken.passing = false;
    }
}

bool server_page_store::put(std::shared_ptr<server_page_base> page, bool over_ceiling, std::shared_ptr<server_page_base> * replaced) {
    std::shared_ptr<server_page_base> gone; // let go after the locks: it gives its bytes back then

    std::lock_guard<std::mutex> lock(mutex);

    if (!page->charge) {
        page->charge = std::make_shared<budget::taken>(bytes);
    }
    auto & taken = static_cast<budget::taken &>(*page->charge);
    auto & entry = entries[page->name];

    {
        std::lock_guard<std::mutex> lock_bytes(bytes->mutex);

        if (!over_ceiling && !bytes->fits(page->n_bytes, taken.n_bytes + freed_by_replacing(page->name))) {
            if (!entry.page) {
                entries.erase(page->name);
            }
            return false;
        }
        bytes->used += page->n_bytes - taken.n_bytes;
        taken.n_bytes = page->n_bytes;

        bytes->passing &= !taken.passing;
        taken.passing = false;
    }

    gone       = std::move(entry.page);
    entry.page = std::move(page);
    entry.n    = n_put++;

    if (replaced) {
        *replaced = std::move(gone);
    }

    return true;
}

std::shared_ptr<server_page_base> server_page_store::get(const std::string & name) const {
    std::lock_guard<std::mutex> lock(mutex);

    const auto it = entries.find(name);

    return it == entries.end() ? nullptr : it->second.page;
}

std::shared_ptr<server_page_base> server_page_store::remove(const std::string & name) {
    std::lock_guard<std::mutex> lock(mutex);

    const auto it = entries.find(name);
    if (it == entries.end()) {
        return nullptr;
    }

    auto page = std::move(it->second.page);
    entries.erase(it);

    return page;
}

std::vector<std::shared_ptr<server_page_base>> server_page_store::list() const {
    std::lock_guard<std::mutex> lock(mutex);

    std::vector<entry> sorted;
    for (const auto & [name, entry] : entries) {
        sorted.push_back(entry);
    }
    std::sort(sorted.begin(), sorted.end(), [](const entry & a, const entry & b) { return a.n < b.n; });

    std::vector<std::shared_ptr<server_page_base>> res;
    for (auto & entry : sorted) {
        res.push_back(std::move(entry.page));
    }
    return res;
}

std::string server_page_name_error(const std::string & name) {
    static const size_t N_MAX = 128;

    if (name.empty()) {
        return "the name of a page must not be empty";
    }
    if (name.size() > N_MAX) {
        return "the name of a page has at most " + std::to_string(N_MAX) + " characters, this one has " + std::to_string(name.size());
    }

    const auto is_allowed = [](unsigned char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
    };
    if (!std::all_of(name.begin(), name.end(), is_allowed)) {
        return "the name of a page is made of letters, digits, '.', '_' and '-'";
    }
    if (name[0] == '.' || name[0] == '-') {
        return "the name of a page must not begin with '.' or '-'";
    }

    if (name.compare(0, 7, "parked-") == 0) {
        return "names that begin with 'parked-' are given by the server";
    }

    for (const std::string suffix : { ".ckpt", ".lora", ".dft", ".page-staging" }) {
        if (name.size() >= suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0) {
            return "the name of a page must not end in '" + suffix + "', which its files have";
        }
    }

    return "";
}
