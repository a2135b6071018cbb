// sources: server-page-record.cpp server-page-checksum.cpp

// Makes the first inputs of fuzz-page-codec.cpp in the directory that it is given: one good file of each kind.

#include "server-page-record.h"

#include "page-codec-fuzzing.h"
#include "page-codec-testing.h"

#include <fstream>

int main(int argc, char ** argv) {
    if (argc != 2) {
        return 2;
    }

    server_page_record rec;
    rec.stage   = "4711-3";
    rec.members = { { FUZZ_NAME, 1234, 1 }, { FUZZ_NAME + ".ckpt", 56, 2 } };
    rec.retired = { FUZZ_NAME + ".lora", FUZZ_NAME + ".dft" };
    const auto record = server_page_record_text(rec);
    const auto body   = record.substr(0, record.rfind("checksum "));

    const std::vector<std::pair<int, bytes>> seeds = {
        { FUZZ_CKPT,                 SMALL_CKPT },
        { FUZZ_CKPT   | FUZZ_SEALED, SMALL_CKPT },
        { FUZZ_LORA   | FUZZ_SEALED, SMALL_LORA },
        { FUZZ_DRAFT  | FUZZ_SEALED, SMALL_DRAFT },
        { FUZZ_RECORD,               raw(record) },
        { FUZZ_RECORD | FUZZ_SEALED, raw(body) },
    };
    for (size_t i = 0; i < seeds.size(); ++i) {
        std::ofstream file(std::string(argv[1]) + "/" + std::to_string(i), std::ios::binary);
        file.put(char(seeds[i].first));
        file.write(reinterpret_cast<const char *>(seeds[i].second.data()), seeds[i].second.size());
        if (!file.flush()) {
            return 1;
        }
    }
    return 0;
}
